"""Options of the commands: flags that are made from the fields of a configuration."""
