"""Integrations of ds_dynatrain with other tools: each file covers one tool, which is imported only when the file is
used."""
