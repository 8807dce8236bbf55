"""Programs that use funcrec as a user would: `python -m funcrec.examples.ctr --help`."""
