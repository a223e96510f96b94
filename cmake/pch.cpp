// The precompiled header needs one source file of its own.
