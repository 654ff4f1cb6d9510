"""The HTTP front: the only importer of aiohttp."""
