"""Code shared by the integrations of several frameworks, which knows none of them.

`batches` is the loader whose item is a whole global batch, `folders` writes checkpoints in place of a framework's own,
`refusal` is a feature that cannot be, `names` checks a framework's private names at import.
"""
