"""ds_dynatrain beside other tools: each file is one of them, imports it only when it is used, and nothing else does."""
