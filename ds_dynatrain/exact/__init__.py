"""Jobs whose losses, gradient norms, weights and moments have the same bits in any world: `"exact": true`.

| file | |
|---|---|
| `extension` | what the engine calls: checks, hooks, and the engine classes of `adapters` |
| `adapters/` | DeepSpeed's engines with gradients that are added leaf by leaf |
| `sums`, `squares` | arithmetic without an order: leaves added in pairs, a sum of squares in integers |
| `steps`, `records`, `difference` | what each step had, in bits; its lines in the report file; two runs compared |
| `rows` | what was tried, and what is refused |
| `machine`, `trial`, `runs` | `ds-dynatrain doctor --exact` and `compare-exact` |
"""
