"""Entry points: each module here is a command; what they share is in the rooms (packages) below them.

Rooms import only rooms that come later in this list: ``sweep`` (the end of a sweep), ``commands`` (the work of each),
``session`` (a measurement), ``config`` (configurations and the command line), ``reporting`` (tables and plots),
``measuring`` (the clock), ``tracing`` (rounds kept and asked again), ``training``, ``grading`` (are answers right),
``planning`` (what a model will cost), ``results`` (records and figures), ``datasets`` (prompts).
"""

import sys

from experiments import removed

removed.refuse(sys.orig_argv)
