"""The engine and the switch; `ds_dynatrain/README.md` lists the files, lowest layer first.

`core` declares what an engine holds, and knows no part. Each part is made of the core and of what else it is given
(`parts`); the user's object (`engine`) has them on one attribute. What is there once in a process is `process`.
`members/`: processes that come into a job, leave it, or die. `checkpoints/`: universal checkpoints of an engine.
"""
