"""blazeproto in the programs that people already use. Each module names one program, and imports it where it is first needed.

from blazeproto.integrations.transformers import register
"""
