"""Grammars for guided decoding, from which a library computes token masks.

    JSON schema, regular expression or choices ─▶ Rules: Lark rules without recursion

Every language is finite: the length of strings, arrays, objects and numbers and the depth of recursion are bounded by
the schema, or by the defaults in `bounds`. A completion that follows its grammar therefore always ends. This package
only creates the grammars; `grammar_compiler` compiles them.
"""
