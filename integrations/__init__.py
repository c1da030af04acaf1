"""Integrations of ds_dynatrain with other tools. Each file covers one tool, which is imported only when needed."""
