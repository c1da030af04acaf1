"""Membership: which processes train together, while they come and go. Knows the standard library and torch.distributed.

| file | what it does |
|---|---|
| `world` | the record of one generation: who trains together, in which order, and why |
| `messages` | what travels between a coordinator and its peers: versioned, bounded, validated |
| `settings` | how many nodes a job wants, and how long is waited for what |
| `roster` | who is alive, and what each one last said of itself |
| `membership` `effects` | the coordinator's decisions, without sockets and without a clock, and what they ask for |
| `recovery` | what a coordinator that was started anew learns from the members |
| `links` `reach` | which hosts do not reach each other: what follows; how members find out |
| `snapshot` | the status of a job |
| `history` `goodput` `view` | what a coordinator remembers of a job; what its time became; all of that as one value |
| `standing` | whether a job runs, and if not, why |
| `feed` `access` | that value for other threads; where readers come, and their token |
| `coordinator` `peer` | the membership behind a socket; its end of one connection |
| `strangers` | connections that have not proved the token: for how long, how many, what the log says |
| `connection` `query` | the other end; what anybody may ask: the status, and that a node leaves |
| `channel` | what proves each message of a connection |
| `address` `announcement` | where to listen, and to whom; an address that stands in a shared file |
| `token` | the secret of a job |
| `hosting` `store` | a coordinator with its store, in whichever process; stores for process groups |
| `handler` `rendezvous` `agent` | the back-end of torchrun; a world of one node; the line to the coordinator |
| `environment` | every environment variable: what is read, what is handed to workers |
| `member` | a worker's side: one connection, one thread, what it tells the script |
| `main_thread` | whether a script gets on, as the thread with the heartbeats sees it |
| `signals` `process` | SIGTERM for threads; a process that ends with its agent, children that do not speak for it |
| `abort` | a way out of collectives that would never end |
"""
