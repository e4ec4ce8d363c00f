"""The interactive commands: chat, batch, bench, models, doctor, completion, and the old `dashinfer_vlm_serve`.

The commands send requests to a `ChatEngine`: an engine in this process, or a server's.
"""
