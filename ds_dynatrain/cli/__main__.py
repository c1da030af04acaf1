"""`python -m ds_dynatrain.cli` is `ds-dynatrain`."""

from ds_dynatrain.cli.main import main

main()
