"""The command line of sfdd: one file per command, each a signature, one library call and one print."""
