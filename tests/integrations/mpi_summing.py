"""`tests/elastic/summing.py` under mpirun: the first line is all that differs. arguments: what to give to `join`."""

from __future__ import annotations

import json
import sys

from ds_dynatrain.integrations import mpi

if __name__ == "__main__":
    place = mpi.join(**json.loads(sys.argv[1]))
    from tests.elastic.summing import Script

    Script().run()
