"""One transaction: a state that is somewhere becomes a state that is laid out elsewhere, on all members or on none.

Start with `switch` (living members are the source) and `restoration` (copies or a checkpoint are).

| file | role |
|---|---|
| `context`, `core`, `process` | what a member has around it; all that an engine holds; the engines of this process |
| `membership`, `sync_points` | who trains together with this process; where the scripts are between two steps |
| `feasible`, `registration` | refusals; what is trained in which groups, and the space of it |
| `targets`, `pending`, `preparation` | layouts to switch to; a switch to come; what is made ready for it |
| `ways` | which way bytes go between two members |
| `carry`, `encoding`, `streams` | state that is no tensor element, as JSON; random streams |
| `layers` | what layers keep besides parameters, on its way from stage to stage |
| `census`, `digest_sides`, `certificate` | where elements lie; what is summed up; the proof of a switch |
| `replicas` | replicas that ranks compute each for itself, within a tolerance |
| `meeting`, `switch` | how members meet and are connected for the next world; the switch, in one vote or in two |
| `swap`, `old_state` | an optimizer off one memory and over another: the one undo; what is held after a commit |
| `restoration`, `regrouping` | new buffers, filled from a source and proved; the same state in other parameter groups |

May import `membership` and `checkpoint`.
"""
