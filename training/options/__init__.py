"""Options of the commands: flags that follow from the fields of a configuration."""
