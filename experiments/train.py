"""Train a drafter for a target: ``python -m experiments.train head=medusa target.name=… data=chat data.file=…``.

The same command trains a small model, Medusa heads, EAGLE-3, MTP modules and block drafters: ``head=`` chooses. From
time to time the head drafts for held-out prompts in the engine, and the weights with the greatest mean acceptance
length are kept. ``accelerate launch -m experiments.train …`` uses the GPUs there are, and ``resume=true out=FOLDER``
goes on with a training that was interrupted.
"""

from experiments.config.launch import Command

train = Command("train")
main = train.main

if __name__ == "__main__":
    main()
