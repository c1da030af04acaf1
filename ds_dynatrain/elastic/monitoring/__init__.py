"""What people and Prometheus see of a running job: read-only, over HTTP, off unless it is asked for.

| file | what it does |
|---|---|
| `goodput` | how much time became training, and what the rest was lost to |
| `history` | what a coordinator remembers of a job for those who watch it; nothing is decided by it |
| `view` `standing` | all of that as one value; whether the job runs, and if not, why |
| `feed` | that value for threads that must not hold the coordinator up |
| `metrics` | the same for Prometheus |
| `page` | the same for a browser: one document, with all that it needs in it |
| `server` `access` | HTTP; where it listens, and the token that readers say |
| `static/` | the page's parts; uPlot, as it was published |
"""
