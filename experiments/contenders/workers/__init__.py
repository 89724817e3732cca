"""Code that runs in the environments of other engines: nothing in here imports this project or torch by itself."""
