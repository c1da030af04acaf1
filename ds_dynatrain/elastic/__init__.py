"""Membership: which processes train together, while they come and go. Knows the standard library and torch.distributed.

| file | what it does |
|---|---|
| `world` | the record of one generation: who trains together, in which order, and why |
| `messages` | what travels between a coordinator and its peers: versioned, bounded, validated |
| `settings` | how many nodes a job wants, and how long is waited for what |
| `membership` | the coordinator's decisions, without sockets and without a clock |
| `roster` | who is alive, what each one said, what members remember of an earlier job; what the decisions ask for |
| `links` `reach` | which hosts do not reach each other: what follows; how members find out |
| `history` `view` | what a coordinator remembers of a job; all that is shown, as one value for other threads |
| `coordinator` `door` | the membership behind a socket; its end of connections, and how long strangers may hold one |
| `connection` | the other end, what proves each message, and what anybody may ask |
| `address` | where a coordinator listens, or a shared file in which it says so |
| `token` `environment` | the secrets of a job; every environment variable: what is read, what is handed to workers |
| `hosting` `store` | a coordinator with its store, in whichever process; stores for process groups |
| `handler` `rendezvous` | the back-end of torchrun; a world of one node, and the agent's line to the coordinator |
| `member` | a worker's side: one connection, one thread, what it tells the script |
| `main_thread` | whether a script gets on, as the thread with the heartbeats sees it |
| `process` | SIGTERM for threads; a process that ends with its agent, children that do not speak for it |
| `abort` | a way out of collectives that would never end |
"""
