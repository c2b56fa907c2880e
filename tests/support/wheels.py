"""The oldest and the latest verl we support, read by syntax tree: what a wheel holds, without importing it."""

import ast
import sys
from importlib import metadata
from pathlib import Path

import pytest

OLDEST = Path(sys.prefix) / "verl-0.9.0"  # `make env` puts it there
INSTALLED = Path(metadata.distribution("verl").locate_file(""))
WHEELS = [pytest.param(OLDEST, id="0.9.0"), pytest.param(INSTALLED, id=metadata.version("verl"))]


def tree(root: Path, module: str) -> ast.Module:
    return ast.parse((root / (module.replace(".", "/") + ".py")).read_text())


def classes(root: Path, module: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree(root, module).body if isinstance(node, ast.ClassDef)}


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}
