"""The command line `ttpu`. Only these modules import typer and rich; what a command needs beyond that is imported when
it runs."""
