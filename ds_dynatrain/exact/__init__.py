"""Jobs whose losses, gradient norms, weights and moments have the same bits in any world: `"exact": true`.

| file | |
|---|---|
| `extension` | what the engine calls: checks, hooks, and the engine classes of `adapters` |
| `adapters/` | DeepSpeed's engines with gradients that are added leaf by leaf |
| `bits/sums`, `bits/squares` | arithmetic without an order: leaves added in pairs, a sum of squares in integers |
| `bits/steps`, `records`, `difference` | what each step had, in bits; its lines in the report file; two runs compared |
| `bits/rows` | what was tried, and what is refused |
| `command`, `machine`, `trial` | `ds-dynatrain compare-exact` and `doctor --exact` |
"""
