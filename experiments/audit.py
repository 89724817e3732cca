"""Is a decoder lossless, with stated odds? ``python -m experiments.audit drafter=model verifier=rejection``.

The subject is our engine; another engine (``+contender=hf_assisted``, ``+contender=openai``); or a function of yours
(``function=my_module.generate``, called with prompt ids, sampling and n). The law of its next tokens is computed from
the target itself. Before it starts, the audit says how surely it will see each mistake that engines have shipped; then
it looks at outputs after the prompts where these would show most, and stops when it is sure. A subject that is not
lossless is an error.
"""

from experiments.config.launch import Command

audit = Command("audit")
main = audit.main

if __name__ == "__main__":
    main()
