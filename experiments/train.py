"""Train a drafter for a target: ``python -m experiments.train head=medusa target.name=… data=chat data.file=…``.

The same command trains a small model, Medusa heads, EAGLE-3, MTP modules and block drafters: ``head=`` chooses. From
time to time the head drafts for held-out prompts in the engine, and the weights with the greatest mean acceptance
length are kept. ``torchrun --nproc_per_node=N -m experiments.train …`` divides the rows among N processes, on as many
GPUs if there are any, and ``resume=true out=FOLDER`` goes on with a training that was interrupted.
"""

from experiments.config.launch import Command

train = Command("train", divides=True)
main = train.main

if __name__ == "__main__":
    main()
