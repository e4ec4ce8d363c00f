"""The command line for people: chat, batch, bench, models, doctor, completion, and the old `dashinfer_vlm_serve`.

The commands ask a `ChatEngine`: one in this process, or a server's by its address.
"""
