"""Membership: which processes train together, in a job whose processes come and go. Uses the standard library and
torch.distributed.

| file | what it does |
|---|---|
| `generation` | the record of one generation: which members train together, in which order, and why |
| `messages` | messages between a coordinator and its peers: versioned, bounded, validated |
| `settings` | how many nodes a job needs, and how long the coordinator waits for each kind of event |
| `membership_machine` | the coordinator's decisions, without sockets and without a clock |
| `roster` | workers counted as alive, with their reports; members that return after a restart; actions to carry out |
| `links` `reach` | hosts that cannot reach each other: what the coordinator does about them; how members find out |
| `history` `view` | the coordinator's record of its job; everything that is shown, as one value for other threads |
| `coordinator` `door` | the membership server; its side of connections, and time limits for unauthenticated peers |
| `connection` | the peers' side of connections, authentication of messages, and the questions that any peer may ask |
| `address` | the address at which a coordinator listens, or the shared file in which it announces that address |
| `token` `environment` | the secrets of a job; every environment variable that is read, or passed on to workers |
| `hosting` `store` | a coordinator with its store, in any process; stores for process groups |
| `handler` `rendezvous` | torchrun's back-end; a world of one node, and the agent's connection to the coordinator |
| `member` | a worker's side: its connection to the coordinator, in one thread, and its messages to the script |
| `main_thread` | whether a script makes progress, as observed by the heartbeat thread |
| `showing` | the last log lines and the stacks of a worker, for people |
| `worker_process` | SIGTERM for threads; ends a process with its agent, and keeps forked children silent |
| `abort` | a way out of collectives that would never end |

May import `errors`, `extension` and `report`; start with `membership_machine`.
"""
