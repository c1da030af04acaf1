"""The transaction: moves state from one set of members and layout to another, either on all members or on none.

Start with `switch` (the source is the members' own state) and `restoration` (the source is copies or a checkpoint).

| file | role |
|---|---|
| `context`, `core`, `process` | a member's surroundings; the state of an engine; the engines of this process |
| `membership`, `sync_points` | who trains together with this process; where members' scripts meet between two steps |
| `feasible`, `registration` | reasons to refuse a switch; trained parameters, their groups and their space |
| `targets`, `pending`, `preparation` | target layouts; answers to the user; what is prepared while training runs |
| `carry`, `encoding`, `streams` | extra state that is no tensor element; its encoding as JSON; random streams |
| `layers` | transfer of what newcomers load, and of what layers keep besides parameters |
| `certificate` | digests of elements; the proof of a switch |
| `replicas` | replicas that each rank computes by itself, compared within a tolerance |
| `switch` | how members meet and connect the next world; the switch, with one vote or two |
| `swap` | moving an optimizer to other memory, and undoing that; where elements lie |
| `restoration`, `regrouping` | new buffers, filled from a source and proved; the same state in other parameter groups |

May import `membership` and `checkpoint`.
"""
