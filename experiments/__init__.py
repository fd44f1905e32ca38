"""Scripts that each answer one question: `python -m experiments.<name> --help`."""
