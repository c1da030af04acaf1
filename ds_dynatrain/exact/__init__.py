"""Exact jobs: losses, gradient norms, weights and moments are bitwise identical in any layout (`"exact": true`).

| file | contents |
|---|---|
| `extension` | the extension that the engine calls: checks, hooks, and the engine classes of `adapters` |
| `adapters/` | DeepSpeed's engines, adding gradients leaf by leaf (a leaf is a micro-batch of fixed size) |
| `bits/sums`, `bits/squares` | sums that do not depend on the number of ranks: leaves in pairs, squares as integers |
| `bits/steps`, `bit_records`, `difference` | records of each step, their lines in the report file, two runs compared |
| `bits/rows` | features that were tried, and refusals |
| `config` | the `exact` block |
| `command`, `machine`, `trial` | `ds-dynatrain compare-exact` and `doctor --exact` |

This package may import only `engine` and `exits`. Begin reading at `extension`.
"""
