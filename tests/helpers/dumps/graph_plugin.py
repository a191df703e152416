"""msprobe's TensorBoard plugin as a library: its own loaders, without a server. Skips where it is not installed."""

import importlib

import pytest

PLUGINS = {"tb-graph-ascend 8.3": "server.app", "mindstudio-probe 26.2": "hierarchy_plugin.server.app"}


def plugin(name):
    """Return a function that imports a module of an installed plugin by its name in the package."""
    package = PLUGINS[name]
    try:
        importlib.import_module(f"{package}.service.graph_service_db")
    except ImportError:
        pytest.skip(f"{name} is not installed")
    return lambda module: importlib.import_module(f"{package}.{module}")


class Opened:
    """A graph file as the plugin opens it; `meta` names rank, step and micro-step as its page does."""

    def __init__(self, module, path, kind="db"):
        state = module("utils.global_state").GraphState
        state.reset_global_state()
        state.set_global_value("logdir", str(path.parent))
        self.found = module("service.graph_service_base").GraphServiceStrategy.load_meta_dir()
        assert not self.found["error"]
        [(run, of_run)] = self.found["data"].items()
        tag = path.name.removesuffix(".db").removesuffix(".vis")
        assert (of_run["type"], tag in of_run["tags"]) == (kind, True)
        of_kind = {"db": ("graph_service_db", "DbGraphService"), "json": ("graph_service_vis", "JsonGraphService")}
        file, name = of_kind[kind]
        self.service = getattr(module(f"service.{file}"), name)(run, tag)
        self.meta = {"run": run, "tag": tag, "type": kind, "rank": 0, "step": 0, "microStep": -1}
        loaded = self.service.load_graph_data()
        self.loaded = loaded if kind == "db" else list(loaded)
        self.config = self._data(self.service.load_graph_config_info())
        self.listed = self._data(self.service.load_graph_all_node_list(self.meta))

    @staticmethod
    def _data(answer):
        assert answer["success"], answer
        return answer["data"]

    def drawn(self, *names, side="Single"):
        """Return the nodes that the page draws, by name, with these nodes opened one after the other."""
        for name in ("root", *names):
            shown = self._data(self.service.change_node_expand_state({"nodeName": name, "nodeType": side}, self.meta))
        return shown

    def info(self, name, side="Single"):
        """Return what the page's panel shows of a node."""
        return self._data(self.service.get_node_info({"nodeName": name, "nodeType": side}, self.meta))

    def with_overflow(self, levels):
        """Return the names of the leaves with a mark."""
        return _names(self._data(self.service.search_node_by_overflow(self.meta, levels)))


def _names(found):
    return {item["name"] if isinstance(item, dict) else item for item in found}
