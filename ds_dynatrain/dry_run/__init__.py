"""The dry run: what a change of layout would cost, without a job, a GPU or torch.

The folder implements `ds-dynatrain plan` (`command`). `models` knows the tensors of models by their configuration,
`planned_job` adds what a DeepSpeed configuration says about their state. `change` reads a user's options, and computes
the answer for one change with `space` and `plan`, like a switch of a running job. `answer` is that answer as plain
data, which `printing` prints, or draws on a page.

May import `config`, `exits`, `plan`, `support` and `terminal`; start with `change`.
"""
