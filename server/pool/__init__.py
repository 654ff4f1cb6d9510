"""The engines: who starts, watches and ejects them."""
