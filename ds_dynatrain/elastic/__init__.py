"""Membership: which processes train together, while they come and go. Knows the standard library and torch.distributed.

| file | what it does |
|---|---|
| `world` | the record of one generation: who trains together, in which order, and why |
| `messages` | what travels between a coordinator and its peers: versioned, bounded, validated |
"""
