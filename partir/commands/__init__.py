"""The subcommands of the command line: each file adds one parser and says what it prints."""
