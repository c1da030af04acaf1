"""Code shared by the integrations of several frameworks. It knows none of them.

`batches` has the loader whose item is a whole global batch, `together` runs a framework's collectives, `folders` writes
checkpoints in place of a framework's own, `refusal` describes an unsupported feature, and `names` checks a framework's
private names at import.
"""
