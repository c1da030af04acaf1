"""What people and Prometheus see of a running job: read-only, over HTTP, off unless it is asked for.

| file | what it does |
|---|---|
| `server` | HTTP, for readers who say the token |
| `metrics` | the job for Prometheus |
| `page` | the job for a browser: one document, with all that it needs in it |
| `static/` | the page's parts; uPlot, as it was published |

What is shown comes from the coordinator: `elastic/history` and `elastic/view`.
"""
