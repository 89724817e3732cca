"""Tests, in the layout of the packages; and the type checker that runs under jaxtyping meanwhile (see the Makefile).

The checker is beartype, told what PEP 484 says of numbers: an ``int`` is fine where a ``float`` is asked for, so that
``SamplingParams(temperature=1)`` is no error. It stands here because jaxtyping finds it by the name of a top-level
package.
"""

from beartype import BeartypeConf, beartype

check_types = beartype(conf=BeartypeConf(is_pep484_tower=True))
