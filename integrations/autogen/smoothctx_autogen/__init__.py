"""smoothctx for AutoGen, AG2 and Microsoft Agent Framework."""
