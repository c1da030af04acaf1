"""Monitoring of a running job by people and Prometheus: read-only, over HTTP, off by default.

| file | what it does |
|---|---|
| `server` | HTTP, for readers with the token |
| `metrics` | the job for Prometheus |
| `page` | the job for a browser: one self-contained document |
| `static/` | the page's parts; uPlot, as it was published |

All of it comes from the coordinator: `elastic/history` and `elastic/view`.

May import `elastic`; start with `server`.
"""
