"""smoothctx for LangGraph and LangChain."""
