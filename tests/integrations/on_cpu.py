"""`-m tests.integrations.on_cpu SCRIPT ARGUMENTS`: a script of Hugging Face's on several CPU ranks."""

import runpy
import sys

from tests.integrations.trainers import allow_ranks

allow_ranks()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
