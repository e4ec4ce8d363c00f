"""Names of threads for which a process that ends by a signal does not wait, since they cannot be stopped."""

MEDIA_THREADS = "dashinfer-vlm-media"
"""They process media in the process itself."""

STORE_THREAD = "dashinfer-vlm-store-weights"
"""It writes a file of converted weights. The next one removes what it leaves."""

CLOSE_THREAD = "dashinfer-vlm-close"
"""It closes an engine, which waits for the current step of the decoder."""

ABANDONED_THREADS = (MEDIA_THREADS, STORE_THREAD, CLOSE_THREAD)
