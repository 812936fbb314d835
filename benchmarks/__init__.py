"""The benchmark: this library and the SDK inside lmcache, in turn, on the same real server. README.md tells how."""
