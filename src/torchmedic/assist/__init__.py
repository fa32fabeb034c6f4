"""What an assistant can ask: tools over the same verbs as the command line, served by the Model Context Protocol."""
