"""What integrations of several frameworks share: none of it knows a framework.

`batches` is the loader whose item is a whole global batch, `folders` writes checkpoints in the place of a framework's
own, `refusal` says that something cannot be, `names` checks at import what a framework does not promise.
"""
