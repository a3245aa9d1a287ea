"""Names, options and help of the commands, by what they are for; ``fsref.cli.app`` puts them together."""
