"""Monitoring of a running job by people and Prometheus: read-only, over HTTP, by default only on its machine.

| file | what it does |
|---|---|
| `server` | the HTTP server, for readers with the token |
| `metrics` | the metrics of the job, for Prometheus |
| `page` | the web page of the job: one self-contained document |
| `static/` | the page's parts, and an unmodified copy of uPlot |

All data comes from the coordinator: `elastic/history` and `elastic/view`.

This package may import only `elastic`. Begin reading at `server`.
"""
