"""The dry run: what a change of layout would cost, computed without a job, a GPU or torch.

The folder implements `ds-dynatrain plan` and `estimate` (`command`). `models` derives the tensors of a model from its
configuration, and `planned_job` adds what a DeepSpeed configuration says about their state. `change` reads the user's
options, and computes the answer for one change with `space` and `plan`, as a running job does for a switch. `answer` is
the answer as plain data, and `printing` prints it or draws it on a page.

This package may import only `config`, `exits`, `plan`, `support` and `terminal`. Begin reading at `change`.
"""
