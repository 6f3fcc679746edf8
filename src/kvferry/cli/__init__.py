"""The `kvferry` command; each subcommand is a module of the same name, imported only when it is called."""
