"""Entry point of `python -m ds_dynatrain.cli`, which does the same as `ds-dynatrain`."""

from ds_dynatrain.cli.main import main

main()
