"""`python -m lousho_ray.cli`: the `lousho` command where the script is not installed."""

from lousho_ray.cli.app import main

if __name__ == "__main__":
    main()
